"""Datasets that need no download, for recipes that must run offline.

reviews                   # film reviews with a sentiment
chats                     # conversations about animals
dates                     # dates as people write them, and in ISO form
dispatches                # news lines with tagged names
digit_images              # scikit-learn's digits as PNG files
stdlib_source             # the source of Python's standard library

They are modules, and not files beside the recipes: a recipe that ``fastloop recipes NAME`` prints trains in any folder.
Recipes of packages, pages of docs/ and tests use them, too.
"""
