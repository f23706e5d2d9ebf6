"""What training and evaluation read: text, questions, prompts as token ids, and folders of models."""
