"""Training: text and generated retrieval in shares, a loop that resumes to the same curve, Algorithm 1's feedback."""
