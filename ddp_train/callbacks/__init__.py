"""Callbacks: optional work of a run, each an option of conf/callbacks. `interfaces.Callback` is their protocol."""
