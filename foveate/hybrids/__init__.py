"""What trains: mixers, the Transformers models made of them, and training; of laLTE and laNSA, and of frozen models."""
