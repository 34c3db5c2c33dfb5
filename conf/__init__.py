"""The config groups: YAML, and this file, so that any Hydra application finds them as `pkg://ddp_train.conf`."""
