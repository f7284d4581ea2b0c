"""Description of kernel problems: shapes, settings, and the parameters to choose from."""
