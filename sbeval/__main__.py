"""`python -m sbeval`, which launchers such as `accelerate launch -m sbeval run ...` need."""

from sbeval.cli import main

if __name__ == "__main__":
    main()
