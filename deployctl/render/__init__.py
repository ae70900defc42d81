"""Text for people: the only place that knows colour, tables and progress bars."""
