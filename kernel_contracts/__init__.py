"""What is promised about a pair of programs, and was it kept. Never imports torch or an engine."""
