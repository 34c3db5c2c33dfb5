"""Only the operating system: processes, files, locks, devices, the network, the terminal. Imports no torch."""
