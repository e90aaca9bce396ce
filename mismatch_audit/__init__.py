"""mismatch-audit: does the serving engine evaluate the policy that the trainer trains?"""

__version__ = "0.1.0"
