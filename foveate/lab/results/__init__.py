"""Results: rows and their schemas, the circumstances of a measurement, the files, and errors that a user can mend."""
