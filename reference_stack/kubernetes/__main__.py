"""The door: python -m reference_stack.kubernetes writes the files of the manifests that follow from code."""

from reference_stack.kubernetes import rendering

if __name__ == "__main__":
    rendering.write()
