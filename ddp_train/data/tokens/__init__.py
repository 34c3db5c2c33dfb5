"""What the token data sets share: shards on disk, and how they are made."""
