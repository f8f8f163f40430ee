"""One small file for each dialect: it translates between its wire form and `SamplingService`, and does nothing else."""
