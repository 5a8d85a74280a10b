"""The compiled CPU backend: C++ in `csrc`, built for the machine it runs on."""
