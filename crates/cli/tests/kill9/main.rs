//! Real processes, real sockets, real files, and `kill -9`.
//!
//! Targets, a writer and a judge are processes of their own; the writer and the judge are this
//! program with other arguments. Each round kills a process at a random moment under load. Then
//! everything is started again, the volume recovered, and the judge reads the drives' bytes.
//!
//! `KILL9_ROUNDS=100` makes a long test; `KILL9_SECONDS` may end it sooner, and `KILL9_SEED`
//! chooses the moments. Twelve rounds cover each kind of death with each kind of drive, log and
//! number of reactors.

mod formula;
mod judge;
mod scene;
mod writer;

use std::time::{Duration, Instant};

use scene::{Dice, LIMIT, Scene, Setup};

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.first().map(String::as_str) {
        Some("writer") => return writer::main(&args[1..]),
        Some("judge") => return judge::main(&args[1..]),
        // The arguments that cargo and IDEs pass to any test program.
        Some("--list") => return println!("kill9: test"),
        _ => {}
    }
    let number = |name: &str| std::env::var(name).ok().and_then(|v| v.parse().ok());
    let rounds = number("KILL9_ROUNDS").unwrap_or(2);
    let seed = number("KILL9_SEED")
        .unwrap_or_else(|| std::time::UNIX_EPOCH.elapsed().map_or(1, |t| t.as_nanos() as u64));
    let seconds = number("KILL9_SECONDS").unwrap_or(u64::MAX);
    println!("kill9: seed {seed}, {rounds} rounds of each");
    let mut dice = Dice(seed);
    let begun = Instant::now();
    let mut counts = [0; 4];
    for round in 0..rounds {
        if begun.elapsed() >= Duration::from_secs(seconds) {
            println!("kill9: {seconds} s are over; {round} rounds were done");
            break;
        }
        for (way, count) in counts.iter_mut().enumerate() {
            // Consecutive rounds differ in all properties: 5 has no factor in common with the
            // number of setups.
            let setup = Setup::number(round as usize + 5 * way);
            WAYS[way](&mut Scene::new(&format!("seed {seed}, round {round}"), setup), &mut dice);
            *count += 1;
        }
    }
    println!(
        "kill9: {counts:?} rounds (writer, targets, all, recovery) judged clean in {:.1} s",
        begun.elapsed().as_secs_f64()
    );
}

/// The kinds of death.
const WAYS: [fn(&mut Scene, &mut Dice); 4] = [writer_dies, targets_die, all_die, recovery_dies];

/// More groups than can be written in the time.
const ENDLESS: u64 = u64::MAX >> 1;

/// The initiator dies, again and again; the targets keep running.
fn writer_dies(scene: &mut Scene, dice: &mut Dice) {
    for _ in 0..3 {
        let (mut writer, _) = scene.write(ENDLESS);
        dice.sleep(40, 300);
        writer.kill();
        let mut reached = scene.recover_and_judge();
        // A judge that never fails would prove nothing.
        if reached[0] > 0 {
            let (clean, printed) = scene.judge(&reached, Some(dice.below(1 << 32)));
            assert!(!clean, "the judge does not miss a block: {printed}");
        }
        reached[0] += 1;
        let (clean, printed) = scene.judge(&reached, None);
        assert!(!clean, "the judge takes a prefix that is not there: {printed}");
    }
}

/// Targets die and come back while the writer continues: nothing is lost (P7).
fn targets_die(scene: &mut Scene, dice: &mut Dice) {
    let (mut writer, _) = scene.write(4000);
    for _ in 0..3 {
        dice.sleep(20, 200);
        let which = dice.below(3);
        for target in 0..2 {
            if which == 2 || which == target {
                scene.kill_target(target as usize);
            }
        }
        dice.sleep(0, 100);
        scene.revive();
    }
    writer.finish(LIMIT);
    let reached = scene.recover_and_judge();
    assert_eq!(reached, [4000, 4000], "everything was written, and closed in order");
}

/// All processes die, at once or one after the other.
fn all_die(scene: &mut Scene, dice: &mut Dice) {
    for _ in 0..2 {
        let (mut writer, _) = scene.write(ENDLESS);
        dice.sleep(40, 300);
        scene.kill_target(0);
        dice.sleep(0, 5);
        writer.kill();
        scene.kill_target(1);
        scene.revive();
        scene.recover_and_judge();
    }
}

/// The recovery dies, with and without a target.
fn recovery_dies(scene: &mut Scene, dice: &mut Dice) {
    let (mut writer, _) = scene.write(ENDLESS);
    dice.sleep(60, 300);
    writer.kill();
    for _ in 0..3 {
        let mut recovery = scene.start_writer(0);
        dice.sleep(0, 40);
        recovery.kill();
        if dice.below(2) == 0 {
            scene.kill_target(dice.below(2) as usize);
            scene.revive();
        }
    }
    scene.recover_and_judge();
}
