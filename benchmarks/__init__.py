"""One table of ratios, each measured against a peer in the same run."""
