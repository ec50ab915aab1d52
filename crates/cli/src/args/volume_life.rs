//! `rio volume list | delete | wipe | rename | grow`

use clap::Args;

use super::volume::{Members, Open};

/// List volumes.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Reads the labels of all drives of the targets that -m names, and the directories of their logs.
Without -m these are the targets of all volumes in the file of known volumes. It finds volumes of which members are missing, and partitions of volumes of which no label is left (state
\"no label\"): `rio volume delete ID --force` frees those. The second table is the space in each log.

Examples:
  rio volume list
  rio volume list -m 192.0.2.10 -m 192.0.2.11
  rio volume list -m 192.0.2.10 -o json | jq '.targets[].log_free_bytes'")]
pub struct List {
    /// The targets: any drive of each.
    #[command(flatten)]
    pub members: Members,
}

/// Delete a volume.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
All data of the volume is lost. Its partitions in the logs are freed first, then the labels of its
drives are erased. The drives are found by their labels, on all namespaces of the targets that -m names.
There is no further question: the name must be that of the labels.

Without --force nothing is deleted if the volume has an owner, or if one of its members is not on these
targets. With --force the owner is displaced, and its next write fails; what is not found stays as it
is. A log may have partitions of a volume of which no label is left, because a drive was replaced or
erased: give the volume's id, which `rio volume list` shows, and --force.

A deletion that was cut off may be repeated.

Examples:
  rio volume delete journal
  rio volume delete journal -m 192.0.2.10 -m 192.0.2.11
  rio volume delete 3f2a9c5e-7d10-4b6e-9a51-c0ffee000001 --force -m 192.0.2.10")]
pub struct Delete {
    /// The volume's name, or its id
    #[arg(value_name = "NAME|ID")]
    pub volume: String,
    /// The targets: any drive of each.
    #[command(flatten)]
    pub members: Members,
    /// Displace an owner, and do without members that are not found
    #[arg(long)]
    pub force: bool,
}

/// Erase labels.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
For a drive that was left over from a volume: erases its label, and nothing else. Without --force the
label must be a copy of another drive's, or all other members must be on these targets without a label
of the volume, and no log may have partitions of it. `rio volume delete` deletes a whole volume.

Examples:
  rio volume wipe -m 192.0.2.10,ns=3
  rio volume wipe -m 192.0.2.10,ns=3 --force")]
pub struct Wipe {
    /// The drives.
    #[command(flatten)]
    pub members: Members,
    /// Erase the label although the drive's volume may be there, or the label can't be read
    #[arg(long)]
    pub force: bool,
}

/// Rename a volume.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
The volume is opened for that, which recovers it after a crash, and released again. It keeps its id and
its data. If the command is cut off after the first label is written, the volume has the new name.

Examples:
  rio volume rename journal ledger
  rio volume rename journal ledger -m 192.0.2.10 -m 192.0.2.11
  rio volume rename journal ledger -m 192.0.2.10 --wait 60")]
pub struct Rename {
    /// The volume.
    #[command(flatten)]
    pub open: Open,
    /// The new name
    #[arg(value_name = "NEW-NAME")]
    pub new_name: String,
}

/// Grow a volume.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
First enlarge the drives: with the target stopped, `truncate -s +8G FILE` for a file, or the means of
the block device; then start the target. Each drive contributes as many whole stripe units as the
smallest has, so all of them must be larger. All data stays in its place, and the new blocks follow the
old ones. The volume is opened for that, which recovers it after a crash, and released again.

A volume gets no further members, and does not shrink.

Examples:
  rio volume grow journal
  rio volume grow journal -m 192.0.2.10 -o json | jq .bytes")]
pub struct Grow {
    /// The volume.
    #[command(flatten)]
    pub open: Open,
}
