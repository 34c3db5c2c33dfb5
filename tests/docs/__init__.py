"""What README and docs show can be typed: every command composes, every YAML is taken, every example runs."""
