"""Access to the operating system, torch's private names, secrets, and the phase of a rank: for all rooms above. Imports no torch."""
