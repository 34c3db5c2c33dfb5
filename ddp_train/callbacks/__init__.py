"""Callbacks: what a run can do beside training, each an option of conf/callbacks. `interfaces.Callback` says what one is."""
