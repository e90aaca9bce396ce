"""Programs that evaluate a policy: one file each. ``base`` holds what they have in common."""
