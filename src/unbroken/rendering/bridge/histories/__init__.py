"""What may stand before a bridge: classes of histories, facts about real ones, and synthetic ones to compare."""
