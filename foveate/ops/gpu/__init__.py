"""What Triton kernels share: the online softmax, capped logits, tiles and the split of work among programs."""
