"""The process that starts the ranks of one node: torch's elastic agent."""
