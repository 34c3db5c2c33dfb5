"""The process that starts the ranks of one machine: torch's elastic agent."""
