"""Reading what a harvest wrote: in order, shuffled, its statistics, its checksums."""
