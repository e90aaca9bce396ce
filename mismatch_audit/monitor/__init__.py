"""After the release: mirrored traffic, sequential evidence, alarms."""
