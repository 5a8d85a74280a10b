"""How files of each architecture are read: one module for each `general.architecture`."""
