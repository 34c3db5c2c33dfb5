"""From a config to the parts of a run, each made once and in the order that they need. Begin at `build.py`."""
