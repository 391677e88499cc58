"""What of the pools outlives the process: blocks of keys and values and snapshots of states, in a cache folder."""
