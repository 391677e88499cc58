"""Questions that tools answer."""

PROMPTS = (
    "What is the weather in Paris?",
    "Will it rain in Oslo over the next three days?",
    "How warm is it in Madrid, in fahrenheit?",
    "Give me the forecast for Nairobi for a week in celsius.",
    'Is it snowing in São Paulo or "New" York?',
    "Find all Python files below src.",
    "Look for files named *.md, but not in subfolders.",
    "Where is config.yaml? Show at most 5 results.",
    "Search /var/log for *.gz files recursively.",
    "Find files that match test_*.py in tests.",
    "Write an email to ann@example.com that the meeting is moved to Monday.",
    "Tell bob@example.com and eve@example.com that lunch is at noon.",
)
