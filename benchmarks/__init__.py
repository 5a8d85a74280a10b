"""What is measured of Quire, and how: each program here writes one JSON below results/, and `docs` tables them."""
