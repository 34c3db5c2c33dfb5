"""Only the operating system: processes, files, locks, devices, the network, the terminal, the environment. Imports no torch."""
