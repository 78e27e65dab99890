"""The door: python -m reference_stack.monitoring writes the dashboards as Grafana's files."""

from reference_stack.monitoring import dashboards

if __name__ == "__main__":
    for name, text in dashboards.files().items():
        (dashboards.FOLDER / name).write_text(text)
