"""Keep eager's results where Inductor's own code gives others."""
