"""What trainers share: opening what a config names, forecasts, memory and the choice of attention."""
