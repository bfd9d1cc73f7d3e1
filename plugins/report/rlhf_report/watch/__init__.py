"""`rlhf watch`: run directories as a live page, and as a table in a terminal. Nothing in a run is ever written."""
