"""What was chosen: kept in memory and on disk, shared by buckets of m and by ranks."""
