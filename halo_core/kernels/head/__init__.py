"""From last hidden states to log-probabilities of targets. Not for losses: methods weigh and sum what comes out."""
