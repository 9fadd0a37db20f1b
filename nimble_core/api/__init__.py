"""What users import: Nimble, Engine, TrainStep."""
