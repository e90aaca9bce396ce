"""From an audit to full traffic, stage by stage, each on evidence."""
