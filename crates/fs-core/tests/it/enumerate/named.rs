//! Programs that were made for one trap each.

use std::sync::Arc;

use riopipe_fs_core::fs::{Fs, JournalMode};
use riopipe_fs_testkit::path::resolve;

use crate::enumerate::mapped::Back;
use crate::enumerate::program::Change::{self, *};
use crate::enumerate::program::Sync;
use crate::enumerate::recorder::{Device, Release};
use crate::enumerate::script::Script;
use crate::enumerate::setup::Setup;
use crate::enumerate::world::{Effort, Mount, World};
use crate::enumerate::{NOW, prepare, prepare_full};

/// The stream of the main journal.
const MAIN: u16 = 0;

fn judge(world: &Arc<World>, setups: &[Setup], program: impl Fn(&Script)) {
    for &setup in setups {
        let script = Script::new(world, setup);
        program(&script);
        assert!(script.has_run(), "{setup:?}: there was no such wait");
        if let Err(broken) = script.judge() {
            panic!("{setup:?}: {}", broken.why);
        }
    }
}

/// In all setups.
fn thorough(program: impl Fn(&Script)) {
    judge(&World::new(Effort::THOROUGH, prepare), &Setup::ALL, program);
}

/// For parts in a wait that only mode `rio` has.
fn thorough_in_rio(program: impl Fn(&Script)) {
    judge(&World::new(Effort::THOROUGH, prepare), &Setup::RIO, program);
}

#[test]
fn a_synced_file_in_a_new_directory_survives_a_cut_of_the_main_commit() {
    thorough(|script| {
        script.change(Mkdir("b/e/f")).change(New("b/e/f/g")).sync("b/e/f/g", Sync::Fsync);
        script.change(New("a/n")).sync("a/n", Sync::FsyncDir);
    });
}

#[test]
fn a_name_that_was_moved_from_is_used_again() {
    thorough(|script| {
        script.change(Rename("a/x", "b/x")).change(New("a/x")).sync("a/x", Sync::Fsync);
    });
}

#[test]
fn a_name_is_created_and_synced_twice() {
    thorough(|script| {
        script.change(New("a/n")).sync("a/n", Sync::Fsync).change(Unlink("a/n"));
        script.change(New("a/n")).sync("a/n", Sync::Fsync);
    });
}

#[test]
fn the_number_of_an_inode_is_used_again() {
    thorough(|script| {
        script.change(New("a/n")).sync("a/n", Sync::Fsync).change(Unlink("a/n"));
        script.sync("", Sync::All).change(New("a/n")).sync("a/n", Sync::Fsync);
        script.change(New("b/x")).sync("b/x", Sync::Fdatasync);
        let ids = script.ids();
        let is_reused = ids.windows(2).any(|pair| pair[0].0 == pair[1].0);
        // The writes to the first one may not be released.
        assert!(is_reused || script.setup == Setup::Eager, "{ids:?}");
    });
}

#[test]
fn files_are_synced_at_the_same_time_on_two_streams() {
    for stream in [1, 2] {
        thorough_in_rio(|script| {
            let name = if stream == 1 { "a/n" } else { "a/m" };
            script.change(New("a/n")).change(New("a/m"));
            script.in_wait(stream, 0, |other| {
                other.change(New("a/o")).change(New("a/p"));
                other.sync("a/o", Sync::Fsync).sync("a/p", Sync::Fsync);
            });
            script.sync(name, Sync::Fsync);
            // One of the two is on this stream.
            script.sync("a/n", Sync::Fsync).sync("a/m", Sync::Fsync);
        });
    }
}

#[test]
fn a_file_is_synced_while_a_commit_is_in_flight() {
    for wait in 0..2 {
        thorough_in_rio(|script| {
            script.change(New("a/n")).sync("a/n", Sync::Fsync).change(Write("a/x", 0, 100));
            script.change(Mkdir("a/d"));
            script.in_wait(MAIN, wait, |other| {
                other.change(New("a/d/f")).sync("a/d/f", Sync::Fsync);
                other.change(Write("a/n", 5000, 100)).sync("a/n", Sync::Fsync);
                other.sync("a/x", Sync::Fsync);
            });
            script.sync("a/n", Sync::FsyncDir);
        });
    }
}

#[test]
fn a_record_does_not_undo_a_later_change_of_a_directory_on_the_way() {
    thorough_in_rio(|script| {
        script.change(Mkdir("a/n")).change(Mkdir("a/n/s"));
        script.in_wait(MAIN, 1, |other| {
            other.change(New("a/n/f")).sync("a/n/f", Sync::Fsync);
        });
        script.sync("a/n", Sync::Fsync);
    });
}

#[test]
fn an_area_comes_around_after_a_commit_in_whose_flight_a_record_was_written() {
    let world = World::new(Effort { nested: 1 << 40, ..Effort::USUAL }, prepare);
    let world = &world;
    // One of them is the last record before the end of the area.
    (124..128).for_each(|records| {
        judge(world, &Setup::RIO, |script| {
            for number in 0..records {
                script.change(Write("a/x", number * 10, 10)).sync("a/x", Sync::Fsync);
            }
            script.change(New("a/n"));
            script.in_wait(MAIN, 1, |other| {
                other.change(Write("a/x", 8000, 100)).sync("a/x", Sync::Fsync);
            });
            script.sync("a/n", Sync::FsyncDir);
            for _ in 0..4 {
                script.change(Write("a/x", 7, 10)).sync("a/x", Sync::Fsync);
            }
        })
    });
}

#[test]
fn a_file_that_was_cut_and_grows_shows_zeroes() {
    thorough(|script| {
        script.change(Truncate("a/x", 100)).change(Truncate("a/x", 10_000));
        script.change(New("a/n")).sync("a/n", Sync::FsyncDir);
    });
    thorough(|script| {
        script.change(Truncate("a/x", 100)).change(Write("a/x", 20_000, 100));
        script.change(New("a/n")).sync("a/n", Sync::FsyncDir);
        script.change(Truncate("a/x", 15_000)).change(New("a/m")).sync("a/n", Sync::FsyncDir);
    });
}

#[test]
fn a_file_is_written_behind_a_barrier_of_another() {
    thorough(|script| {
        script.change(Write("a/x", 0, 100)).sync("a/x", Sync::Barrier);
        script.change(Write("b/y", 0, 100)).sync("b/y", Sync::Fsync);
        script.change(Write("a/x", 6000, 100)).sync("a/x", Sync::Barrier);
        script.change(Write("a/x", 9000, 100)).sync("a/x", Sync::Barrier);
        script.change(New("a/n")).sync("a/n", Sync::Fsync);
    });
}

#[test]
fn a_new_file_without_data_is_synced_behind_a_barrier_of_another() {
    thorough(|script| {
        script.change(New("b/x")).sync("b/x", Sync::Barrier);
        script.change(Create("a/n")).sync("a/n", Sync::Fsync);
    });
}

#[test]
fn mount_and_unmount_can_be_cut_anywhere() {
    let effort = Effort { nested: 1, ..Effort::THOROUGH };
    judge(&World::new(effort, prepare), &Setup::ALL, |script| {
        script.change(New("a/n")).sync("a/n", Sync::Fsync).change(Unlink("a/x"));
        script.change(Change::Mkdir("b/x")).unmount();
    });
}

#[test]
fn a_mapped_file_is_written_behind_a_barrier_of_another() {
    thorough(|script| {
        script.change(Store("a/x", Back::Later)).sync("a/x", Sync::Barrier);
        script.change(Store("b/y", Back::Later)).sync("b/y", Sync::Fsync);
        script.change(Store("a/x", Back::Split)).sync("a/x", Sync::Barrier);
        script.change(Store("a/x", Back::Reversed)).sync("a/x", Sync::Fsync);
    });
}

#[test]
fn an_overwrite_behind_a_barrier_of_its_stream_is_not_there_without_it() {
    thorough(|script| {
        // The first and the last one are on one stream.
        script.change(New("a/n")).change(New("a/m")).change(New("a/o")).sync("", Sync::All);
        script.change(Write("a/n", 0, 100)).sync("a/n", Sync::Barrier);
        script.change(Write("a/o", 0, 100)).sync("a/o", Sync::Fsync);
        script.change(Write("a/o", 0, 200)).sync("a/o", Sync::Barrier);
        script.change(Write("a/o", 4096, 200)).sync("a/o", Sync::Fdatasync);
        script.change(Write("a/n", 0, 300)).sync("a/n", Sync::Barrier);
        script.change(Write("a/o", 0, 300)).sync("a/o", Sync::Barrier);
        script.change(Write("a/n", 4096, 300)).sync("a/n", Sync::Fsync);
    });
}

#[test]
fn an_fsync_without_new_data_makes_a_barrier_of_its_stream_durable() {
    thorough(|script| {
        script.change(New("a/n")).sync("a/n", Sync::Barrier);
        script.change(Rename("a/x", "b/x")).sync("b/x", Sync::Fdatasync);
    });
}

#[test]
fn a_block_of_a_removed_directory_becomes_data_before_and_after_its_revoke_is_durable() {
    let program = |script: &Script| {
        script.change(Mkdir("a/d")).change(Mkdir("a/d/e")).sync("", Sync::All);
        script.change(Rmdir("a/d/e")).change(Rmdir("a/d"));
        script.change(Write("a/x", 8192, 12_288)).sync("a/x", Sync::Fsync);
        script.sync("", Sync::All);
        script.change(Write("b/y", 12_288, 12_288)).sync("b/y", Sync::Fsync);
    };
    thorough(program);
    judge(&World::new(Effort::THOROUGH, prepare_full), &Setup::ALL, program);
}

#[test]
fn a_commit_is_not_there_while_another_stream_has_a_hole() {
    thorough(|script| {
        script.change(New("a/n")).change(New("a/m")).change(Write("b/y", 12_288, 5000));
        script.sync("", Sync::All);
    });
}

#[test]
fn a_block_passes_to_another_stream_and_a_replay_sends_the_old_write_again() {
    let world = World::new(Effort::THOROUGH, prepare);
    for setup in Setup::RIO {
        let device = Device { release: Release::Late, ..setup.device() };
        let script = Script::on(&world, setup, device);
        script.change(New("b/x")).sync("b/x", Sync::Fsync);
        script.change(New("a/n")).sync("a/n", Sync::Fsync);
        script.change(Unlink("a/n")).sync("", Sync::All);
        script.change(Write("b/x", 8192, 8192)).sync("b/x", Sync::Fsync).sync("", Sync::All);
        script.change(Write("b/x", 16_384, 8192)).sync("b/x", Sync::Fsync);
        script.judge().unwrap_or_else(|broken| panic!("{setup:?}: {}", broken.why));
    }
}

#[test]
fn an_old_record_is_not_taken_after_ext4_used_the_journal() {
    let records = |fs: &Fs| {
        prepare(fs);
        for number in 0..20 {
            Change::Write("a/x", 0, 1000).run(fs, number, &mut || ()).unwrap();
            fs.fsync(resolve(fs, "a/x").unwrap(), false, NOW).unwrap();
        }
    };
    // The log of ext4 ends before the areas, in them, and behind them.
    for commits in [1, 100, 500] {
        let kernel = |fs: &Fs| {
            for number in 0..commits {
                Change::Write("a/x", 0, 2000).run(fs, number, &mut || ()).unwrap();
                fs.sync(NOW).unwrap();
            }
        };
        let mounts: [Mount<'_>; 2] = [(JournalMode::Rio, &records), (JournalMode::Ext4, &kernel)];
        let world = World::after(Effort::THOROUGH, &mounts);
        judge(&world, &Setup::ALL, |script| {
            script.change(New("a/n")).sync("a/n", Sync::Fsync);
            script.change(Write("a/x", 0, 100)).sync("a/x", Sync::Fsync);
        });
    }
}

#[test]
fn blocks_and_numbers_are_used_again_at_once_on_a_nearly_full_image() {
    judge(&World::new(Effort::USUAL, prepare_full), &Setup::ALL, |script| {
        script.change(New("a/n")).sync("a/n", Sync::Fsync).change(New("a/m"));
        script.sync("a/m", Sync::Fsync).change(Write("a/n", 8192, 60_000));
        script.sync("a/n", Sync::Fsync).change(Unlink("a/n"));
        // There is no space before a commit frees the other file.
        script.change(Write("b/y", 12_288, 60_000)).sync("b/y", Sync::Fsync);
        script.change(Unlink("a/x")).change(New("b/e/f")).sync("b/e/f", Sync::Fsync);
        script.change(Truncate("b/y", 0)).change(Write("b/e/f", 8192, 60_000));
        script.sync("b/e/f", Sync::Fdatasync);
        let ids = script.ids();
        let is_reused = ids.windows(2).any(|pair| pair[0].0 == pair[1].0);
        assert!(is_reused, "{ids:?}");
    });
}

#[test]
fn recovery_and_hand_back_can_be_cut_and_cut_again() {
    let effort = Effort { depth: 2, states: 48, ..Effort::THOROUGH };
    judge(&World::new(effort, prepare), &Setup::ALL, |script| {
        let ino = resolve(&script.fs, "b/y").unwrap();
        script.fs.open(ino).unwrap();
        script.change(New("a/n")).sync("a/n", Sync::Fsync).change(Unlink("b/y"));
        script.change(Truncate("a/x", 100)).sync("a/x", Sync::FsyncDir);
        script.change(Write("a/n", 8192, 5000)).sync("a/n", Sync::Fsync);
    });
}

#[test]
fn e2fsck_recovers_what_mode_ext4_has_left() {
    let effort = Effort { replayed: 4, nested: 1 << 40, ..Effort::USUAL };
    judge(&World::new(effort, prepare), &[Setup::Ext4], |script| {
        let ino = resolve(&script.fs, "b/y").unwrap();
        script.fs.open(ino).unwrap();
        script.change(New("a/n")).sync("a/n", Sync::Fsync).change(Unlink("b/y"));
        script.change(Rename("a/x", "b/x")).sync("b/x", Sync::Fsync);
        script.change(Mkdir("a/d")).change(Truncate("a/n", 100)).sync("a/d", Sync::FsyncDir);
    });
}

#[test]
fn a_file_is_replaced_before_its_second_barrier_is_durable() {
    thorough(|script| {
        script.change(New("a/n")).sync("a/n", Sync::Barrier);
        script.change(Write("a/n", 5000, 4000)).sync("a/n", Sync::Barrier);
        script.change(Rename("a/x", "a/n")).sync("a/n", Sync::Fdatasync);
        script.change(New("b/x")).sync("b/x", Sync::Fsync);
    });
}
