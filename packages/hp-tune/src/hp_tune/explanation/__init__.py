"""Why a search chose what it chose."""
