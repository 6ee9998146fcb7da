"""A plan shown to people, as a page and in the terminal. Pure: knows numbers, not where they come
from."""
