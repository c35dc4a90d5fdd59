"""Block-sparse attention on one device and over a Ulysses x Ring mesh."""
