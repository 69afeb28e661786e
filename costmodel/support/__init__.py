"""What everything rests on: counts, folders, bounded memory, locks, processes that may die."""
