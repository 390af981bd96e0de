"""Images of a task: read, decoded, batched, and their models.

data                      # the ``data`` section: folders of images, or a function
classes                   # the class of a folder, by its name
processors, transforms    # an image -> the input of a model
reading                   # decodes the file of an image; tries the images of all splits before training
batches                   # random changes, samples and batches
repeats                   # images that repeat each other
stored_datasets           # datasets with a column of images, which are refused
model, libraries          # models of transformers, torchvision and timm
"""
