"""The loop that samples while it trains (`LoopConfig.max_staleness` above 0), and its resume."""
