//! Opening and recovering a volume, against targets that are plain models. Wherever it is cut off,
//! the same prefix is found and the same bytes are left (T9).

mod cases;
mod crash;
mod errors;
mod given_up;
mod hostile;
mod owner;
mod redirected;
mod world;
