"""Where features are stored: folders on disks and in object stores, and the formats of shards."""
