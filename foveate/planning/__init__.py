"""What a model with a long context needs and takes on a GPU, by arithmetic (`foveate plan`).

No weights, GPU or vLLM is needed.
"""
