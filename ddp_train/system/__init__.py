"""What a process stands on: the operating system, what of torch is private, what is a secret, the phase of a rank. Imports no torch."""
