//! Opening and recovering a volume, against targets that are plain models: whatever is cut off
//! whenever, the same prefix is found and the same bytes are left (T9).

mod cases;
mod crash;
mod errors;
mod given_up;
mod hostile;
mod owner;
mod world;
